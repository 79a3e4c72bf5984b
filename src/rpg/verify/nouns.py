"""Words that may stand behind a number without changing it: what is counted, and what it is said to be like.

A list of what is right: a word that is not here is no unit, and the answer is another one. No word here scales a number
(million, dozen, half), negates it (less, below), hedges it (about, maybe) or says how it is written (in binary).
"""

from __future__ import annotations

THINGS = """
account acorn action activity ad adult age airplane album ambulance angle animal ant apartment apple apron arc arm
arrangement arrow article artwork asymptote athlete attendee aunt avocado award baby bacon badge bag bagel baht bale
ball balloon banana band bandage bank bar barrel baseball basil basket basketball bat batch bath bathroom battery
beach bead beaker bean bear bed bedroom bee beer bell belt berry bicycle bike bill bird birthday biscuit bit blanket
blister block blouse blueberry boat body bolt bone bonus book boot bottle bouquet bow bowl box boy bracelet branch
bread break brick bridge broom brother brownie brush bucket bug building bulb bun bunch bundle bunny burger burrito
bus bush business butter butterfly button byte cabin cabinet cage cake calculator call calorie camel camera camper can
candle candy cap capsule captain car carbohydrate card carpet carriage carrot cart carton case cat caterpillar cell
cereal chair challenge chance change channel chapter character charge cheese cheeseburger chef cherry chick chicken
child chip chocolate choice chord chore circle city class classmate classroom claw client clip clock cloth clothes
cloud clove club coach coat coconut coefficient coffee coin collar color colour column combination comic commercial
committee computer concert cone contact container cookie copy corn cost costume couch country couple coupon course
cousin cover cow crab cracker crate crayon credit cricket croissant crop cross crow cub cube cucumber cup cupcake
curtain customer cut cycle cyclist cylinder daisy dancer dap date daughter deck decoration deer defect delivery desk
dessert diagonal diamond dice die digit dime dinar dinner dinosaur dish divisor dog doll dolphin donation donkey donut
door dot doughnut dove dragon drawing dress drink driver drop drum duck duckling eagle ear earring edge egg elephant
elf email employee engine entry envelope episode equation eraser error essay event exam exercise eye face fact factor
family fan farm farmer feather fee fence field fight figure figurine file film finger firework fish flag flamingo
flash flashlight flat flavor flavour flea flight floor flour flower flute fly follower food football fork fossil
fountain fox fraction franc freckle friend frog fruit fuel function game gas gate gecko gem gift gigabyte giraffe girl
glass glove glue goal goat gold goldfish goose grade grain grandchild granola grape grapefruit grass group guava guest
guitar gumball guppy hair haircut hamburger hammer hamster hand handful handshake hat hawk head heart helmet hen herb
hexagon highlighter hike hippo hit hole home homework honey hop horse horseshoe hose hospital hotdog hotel house human
ice idea inning insect instrument integer intersection iris island issue item jacket jar jelly jellybean jersey jewel
job joke judge juice jump kangaroo kernel key keyboard kid kilobit kilobyte kitten kiwi knife knight knot lab ladder
lady ladybug lake lamb lamp lap laptop latte lawn leaf leg lemon lemonade length leopard lesson letter level lifeguard
light lightbulb lily line lion list lizard load loaf lobster log lollipop loop lunch machine magazine magnet mail male
man mango marble mark marker marshmallow mask mat match matchstick meal meat meatball medal meeting megabit megabyte
melon member men message metal mile milk milkshake minivan mint mirror missile mistake model money monkey monster
mosquito motorcycle mountain mouse mouth movie muffin mug multiple museum mushroom nail name napkin neck necklace
needle neighbor neighbour nephew nest net newspaper nickel niece night noodle note notebook novel number nurse nut
object ocean octagon octopus office omelet onion operation orange orchid order ordering ornament outcome outfit owl
oyster pack package packet page pail pain paint painting pair pan pancake panda panel pansy pant paper parent park
parking parrot part participant partition party pass passenger passport pastry patch path patient patron paw payment
pea peach peacock peanut pear pearl pebble peg pen pence pencil penguin pentagon pepper performance performer
perimeter period permutation person peso pet petal petunia pfennig phone photo photograph piano pickle picture pie
piece pig pigeon piglet pill pillow pilot pin pine pineapple pinecone pint pipe pirate pitch pitcher pixel pizza place
plan plane planet plank plant plate play player plot plum pocket poem point pole polygon pool popcorn popsicle portion
position possibilities possibility post postcard poster pot potato pouch powder practice present pretzel price prime
printer prism prize problem product profit program project pumpkin pup pupil puppy purse push-up pushup puzzle pyramid
quarter question quilt quiz rabbit race racer raffle rain raisin rat recipe record rectangle region rep repetition
report reptile request restaurant revolution ribbon rice ride ring river road robot rock roll room roommate rooster
root rope rose rotation round row ruble rubles ruby rug rule ruler run runner rupee sack saddle salad salary salmon
sand sandwich sapling sausage scarf school scissors scoop scooter screw sea seagull seal season seat section seed
seedling segment sentence sequence series serving session set shark sheep sheet shelf shell shilling ship shirt shoe
shop shore short shot shovel show shrimp sibling side sign signature silver singer sister sit-up situp skein ski skirt
slice slide slipper slot smoothie snack snail snake snow snowball snowflake soap sock soda sofa soldier solution son
song sound soup space spade spaghetti sparrow speaker specie species sphere spider spiderweb spinach spoke sponge
spool spoon spot square squid squirrel stack stair stall stamp stapler star starfish state statue steak step stick
sticker stitch stock stone stop store story straw strawberry street string strip stripe student stuff subject
subscriber subset sugar suit suitcase sunflower supply surfer survey swan sweater sweet swimmer switch sword symbol
syrup table tablet taco tadpole tail tank tape target task tattoo taxi tea teacher team teammate teddy teen teenager
telephone television tennis tent terabyte term test text thing ticket tie tiger tile time tin tip tire tissue toast
toddler toe toilet token tomato tool tooth toothbrush toothpick top topping towel tower town toy track tractor train
trainer transaction trapezoid tray treat tree triangle trip trout truck trumpet tub tube tulip turkey turn turtle twig
twin type umbrella uncle unicorn uniform value van vase vegetable vehicle vertex vial video vine violin visit visitor
vote voter wage waiter wall walnut wash watch water watermelon wave way weasel web weekday weekend weight whale wheel
whisker whistle widget wife win window wine wing winner wolf woman won wood word work worker workout worm yarn yoga
yogurt zebra zombie zoo
"""

LIKE = """
a acute additional altogether an apiece apple average big black blue board brown chocolate cold comic common
consecutive cotton deep different distinct each empty english equal equilateral even every extra female free fresh
full golden good gray green grey gummy high history hot identical in individual isosceles jelly junior large lattice
left little long male math medium metal more nautical new nonnegative obtuse odd of old on orange ordered overall
peanut per pine pink plastic positive possible prime purple real red regular remaining right ripe science senior short
silver single small soccer sold stuffed tall tennis the total unique vanilla video white whole wide wooden yellow
"""

MANY = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "grandchildren": "grandchild",
    "teeth": "tooth", "mice": "mouse", "geese": "goose", "oxen": "ox", "vertices": "vertex", "wives": "wife",
    "knives": "knife", "loaves": "loaf", "leaves": "leaf", "shelves": "shelf", "scarves": "scarf", "wolves": "wolf",
    "elves": "elf",
}  # fmt: skip

NOUNS, ADJECTIVES = frozenset(THINGS.split()), frozenset(LIKE.split())


def singular(word: str) -> str:
    """Of a word in the list; any other as it is."""
    one = MANY.get(word, word)
    endings = ((one, ""), (one.removesuffix("s"), "s"), (one.removesuffix("es"), "es"), (one[:-3] + "y", "ies"))
    return next((stem for stem, end in endings if one.endswith(end) and stem in NOUNS), one)
